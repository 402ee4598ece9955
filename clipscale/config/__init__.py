"""The settings of every verb as plain dataclasses, with help, choices and least values in their fields. Needs no torch."""
