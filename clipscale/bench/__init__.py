"""Benchmarks, beside peers where these are installed.

    clipscale bench loss    loss.py   loss_work.py: what a process measures    loss_methods.py: what is compared
    clipscale bench step    step.py   step_work.py                             step_variants.py
    clipscale bench data    data.py   data_work.py
    python -m clipscale.bench.fit       whole runs beside `clipscale plan`, and the largest batch that a machine holds

Each declares columns, targets and panels. driver.py measures part by part, harness.py starts fresh processes, worker.py measures in them,
memory.py the memory of a step; record.py writes records, present.py judges, prints and draws them.
"""
