"""Text from anywhere becomes rows on disk. You need not read it to understand training.

job         what there is to do: units of text, each of which can be done by itself
worker      one unit is a pure function, so any number of machines gives the same bytes
sources     text from files, the standard library or the Hub
"""
