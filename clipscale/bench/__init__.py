"""Benchmarks, against peers where these are installed.

    clipscale bench loss    loss.py: settings, rows      loss_work.py: what a process measures   loss_methods.py, loss_profile.py
    clipscale bench step    step.py                      step_work.py                            step_ways.py
    clipscale bench data    data.py                      data_device.py: on a GPU
    -m clipscale.bench.runs     runs.py: whole runs beside `clipscale plan`                      runs_work.py
    -m clipscale.bench.largest  largest.py: the largest batch that a machine holds

Each has its table and legend (*_table.py) and its picture (*_draw.py). Shared: machine (what it ran on), processes (fresh ones that
measure), memory (what a step takes), figures (counts, spreads), records (JSON that is taken up again), sheet (table as text and Markdown),
verdicts (the bars), show (tables and pictures again, from records).
"""
