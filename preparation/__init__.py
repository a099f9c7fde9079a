"""Text from anywhere becomes rows on disk. You need not read it to understand training.

sources     text from files, the standard library or the Hub, in units that can be redone
worker      one unit is a pure function, so any number of machines gives the same bytes
"""
