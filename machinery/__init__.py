"""What makes a run robust and repeatable. You need not read it to understand training.

errors      every exit code, in one table
cli         a command line becomes a preset; a mistake becomes one sentence
disk        a file is whole or not there; a folder has one owner
shards      rows on disk are what their manifest says, row by row
ranks       device and dtype are found; ranks meet in bounded time, or the missing one is named
plan        every decision that the program takes is printed before the first step
folders     a run reads the data it was begun with, and no other run writes into its folder
build       a weight exists once; what does not compile or fit falls back, and says so
checkpoint  killed anywhere, a run resumes from the newest valid checkpoint to the same bits
store       what comes from a store has its hash; names stay under the URL
mirror      a run outlives its machine; two machines do not write one run
stage       data is brought to a local disk, verified, before a run begins
log         what a run did is in metrics.jsonl, whatever else fails
trained     a trained model is found by one word
"""
