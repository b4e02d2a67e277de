"""The flight recorder: what every rank did last, and the reports made from it."""
