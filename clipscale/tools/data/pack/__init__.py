"""`clipscale data pack`: reads pictures and captions as people have them, and writes shards.

    verb.py        the verb: the source, and the folder of the shards
    parts.py       packs pairs in parts, each by a process
    report.py      prints what was packed and what was left out, and what helps
    pairs.py       a source -> pairs of a picture and its captions: tables, folders, COCO's captions
    tables.py      a table -> its columns and rows, whatever its form
    separated.py   rows of separated values, with broken quotes repaired; lines.py decodes them
    objects.py     rows of JSON in several forms
    parquet.py     rows of Parquet
    places.py      where a picture lies, and its bytes

A pair that cannot be used is left out and counted by its reason. It never ends the command.
"""
