"""The performance model: predicts how long operations and training steps take on hosts and links.

``torchestra calibrate`` measures its numbers (:mod:`torchestra.performance.calibration`). Only the commands
import this package.
"""
