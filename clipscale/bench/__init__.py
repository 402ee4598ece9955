"""Benchmarks, beside peers where these are installed.

    clipscale bench loss    loss.py   loss_work.py: what a process measures    loss_methods.py: what is compared
    clipscale bench step    step.py   step_work.py
    clipscale bench data    data.py   data_work.py

Each declares columns, targets and panels. record.py measures part by part and keeps records, harness.py starts fresh processes, worker.py
measures in them, present.py judges, prints and draws.
"""
