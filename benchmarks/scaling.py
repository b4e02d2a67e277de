"""Draw predicted scaling curves: `python -m benchmarks.scaling --calibration FILE` writes docs/scaling.png.

Weak scaling: a training step with the same compute on every rank, 8 to 100,000 ranks. Strong scaling: the
same compute in all, divided among the ranks. Overheads of messages are those of the calibration's link. It
takes some minutes; --json writes the numbers as well.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchestra.engine.recorder.trace import replacing
from torchestra.performance.calibration import Calibration, LinkCalibration
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import predict
from torchestra.performance.what_if import rebucketed
from torchestra.performance.workload import Step

RANKS_PER_HOST = 8
HOSTS = (1, 2, 8, 32, 128, 512, 2048, 12_500)
COMPUTE_S, WHOLE_COMPUTE_S = 0.5, 512.0
"""Of a rank in weak scaling, and of all ranks together in strong scaling."""

GRADIENT_BYTES, BUCKET_BYTES = 100 << 20, 25 << 20
LATENCY_S = 20e-6
LINKS = {"10 Gbit/s": 10e9, "100 Gbit/s": 100e9}
COLOURS = ("#d6006c", "#1f6fb4")


def predicted(
    calibration: Calibration, link: LinkCalibration, hosts: int, compute_s: float
) -> dict[str, Any]:
    """Return what a step takes on so many hosts."""
    host = replace(calibration.host, cores=2 * RANKS_PER_HOST)
    machine = Machine(hosts, RANKS_PER_HOST, host, link if hosts > 1 else None)
    third = compute_s / 3
    whole = Step(third, 2 * third, 0.0, (GRADIENT_BYTES,), (2 * third,))
    began = time.process_time()
    prediction = predict(rebucketed(whole, BUCKET_BYTES), machine)
    return {
        "ranks": machine.ranks,
        "compute_s": compute_s,
        "seconds": prediction.seconds,
        "waiting_share": prediction.waiting_share,
        "messages": prediction.messages,
        "cpu_s": time.process_time() - began,
    }


def curves(calibration: Calibration) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the points of all curves: by kind of scaling, and link."""
    assert calibration.link is not None
    found: dict[str, dict[str, list[dict[str, Any]]]] = {"weak": {}, "strong": {}}
    for name, bits_per_s in LINKS.items():
        changes = {"gap_per_byte_s": 8 / bits_per_s, "latency_s": LATENCY_S}
        classes = tuple(replace(each, **changes) for each in calibration.link.classes)  # type: ignore[arg-type]
        link = replace(calibration.link, classes=classes, shares_cores=False, operations=())
        for kind, points in found.items():
            points[name] = []
            for hosts in HOSTS:
                share = WHOLE_COMPUTE_S / (hosts * RANKS_PER_HOST)
                points[name].append(
                    predicted(calibration, link, hosts, COMPUTE_S if kind == "weak" else share)
                )
                print(kind, name, points[name][-1], flush=True)
    return found


def draw(found: dict[str, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    """Draw the curves into a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {
        "weak": f"Weak scaling: {COMPUTE_S:g} s of compute on every rank",
        "strong": f"Strong scaling: {WHOLE_COMPUTE_S:g} s of compute in all",
    }
    for axes, (kind, lines) in zip(figure.subplots(1, 2), found.items(), strict=True):
        for colour, (name, points) in zip(COLOURS, lines.items(), strict=True):
            ranks = [point["ranks"] for point in points]
            axes.plot(
                ranks, [point["seconds"] for point in points], "o-", color=colour, label=name, markersize=4
            )
        axes.plot(
            ranks, [point["compute_s"] for point in points], "--", color="#6b6b6b", label="compute alone"
        )
        axes.set_xscale("log")
        if kind == "strong":
            axes.set_yscale("log")
        else:
            axes.set_ylim(
                bottom=0.0, top=1.1 * max(point["seconds"] for each in lines.values() for point in each)
            )
        axes.set_title(titles[kind], loc="left", fontsize=10)
        axes.set_xlabel(f"ranks, {RANKS_PER_HOST} on each host")
        axes.set_ylabel("seconds of a step")
        axes.grid(visible=True, color="#e5e5e5", linewidth=0.6)
        axes.legend(frameon=False, fontsize=9)
    with replacing(path, binary=True) as file:
        figure.savefig(file, format="png", dpi=130)


def main() -> None:
    """Predict, write the picture, and tell what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/scaling.png"))
    options = parser.parse_args()
    found = curves(Calibration.load(options.calibration))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    draw(found, options.output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{options.output}: {peak:.0f} MiB at most")


if __name__ == "__main__":
    main()
