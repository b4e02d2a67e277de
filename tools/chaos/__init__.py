"""Real faults in real processes: what happens to ranks that work when the machine does not.

    python -m tools.chaos --minutes 3 [--faults kill,stop,link] [--seed N]

A round draws a world (plan.py), a workload (workloads.py) and a fault (faults.py), lets the ranks work, and
has the fault come at a random moment. Afterwards invariants.py looks at how each rank ended: with the right
results, or with an error that says what happened and names the right rank, in time, and with nothing left.
"""
