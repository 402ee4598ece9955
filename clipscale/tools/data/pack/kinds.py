"""Recognises files that training does not read as pictures, by their first bytes."""

import re

# Suffix of a kind of file -> the pattern of such a file's beginning.
BEGINNINGS = {
    ".tif": re.compile(rb"II[*+]\0|MM\0[*+]", re.I | re.S),
    ".avif": re.compile(rb"....ftyp(avi[fs]|mif1.{0,32}avif)", re.I | re.S),
    ".heic": re.compile(rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.I | re.S),
    ".jxl": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL ", re.I | re.S),
    ".jp2": re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", re.I | re.S),
    ".psd": re.compile(rb"8BPS", re.I | re.S),
    ".svg": re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--[^>]*-->\s*)?(<!DOCTYPE svg[^>]*>\s*)?<svg", re.I | re.S),
    ".html": re.compile(rb"\s*(<!--[^>]*-->\s*)?<(!doctype html|html|head|body)", re.I | re.S),
    ".pdf": re.compile(rb"%PDF", re.I | re.S),
}
OTHER_PICTURES = (".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".psd", ".svg")


def suffix_of(data: bytes) -> str:
    """The suffix of a file's kind, by its first bytes; empty for pictures of other kinds, and for an unknown one."""
    first = data[:4096].removeprefix(b"\xef\xbb\xbf")
    return next((suffix for suffix, begins in BEGINNINGS.items() if begins.match(first)), "")
