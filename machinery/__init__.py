"""What makes a run robust and repeatable. You need not read it to understand training.

errors      every exit code, in one table
cli         a command line becomes a preset; a mistake becomes one sentence
durable     a file is whole or not there; a folder has one owner
shards      rows on disk are what their manifest says, row by row
sources     text from files, the standard library or the Hub, in units that can be redone
worker      one unit is a pure function, so any number of machines gives the same bytes
ranks       device and dtype are found; ranks meet in bounded time, or the missing one is named
plan        every decision that the program takes is printed before the first step
setup       a weight exists once; what does not compile or fit falls back, and says so
checkpoint  killed anywhere, a run resumes from the newest valid checkpoint to the same bits
diary       what a run did is in metrics.jsonl, whatever else fails
fused       the same numbers and gradients in less time, or not used
"""
