"""The settings of every verb as plain dataclasses, with help, choices and bounds in their fields. Needs no torch."""
