"""How every page of ullage's begins: complete in itself, whatever draws it."""

from __future__ import annotations


def begun(style: str) -> str:
    """The text of a Template up to what is drawn; it takes ``title`` and ``facts``."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>{style}</style>
</head>
<body>
<h1>$title</h1>
<p>$facts</p>
"""
