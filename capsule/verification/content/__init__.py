"""Comparing what two files say where their bytes differ; one small file for each format.

The files are untrusted: they are parsed within bounds and never unpickled, and what does not
parse is compared as bytes.
"""
