"""What makes a run robust and repeatable. You need not read it to understand training.

errors      every exit code, in one table
cli         a command line becomes a preset; a mistake becomes one sentence
disk        a file is whole or not there; no name, link or size leads out of its folder
shards      rows on disk are what their manifest says, row by row
ranks       device and dtype are found; ranks meet, and answer each other, in bounded time
plan        every decision that the program takes is printed before the first step
folders     a run reads the data it was begun with, and no other run writes into its folder
build       a weight exists once; what does not compile or fit falls back, and says so
checkpoint  killed anywhere, a run resumes from the newest valid checkpoint to the same bits
store       what goes to a store is read back and hashed, what comes from it has its hash
mirror      a run outlives its machine; two machines do not write one run
stage       data is on a local disk, whole and verified, before the first step
log         what a run did is in metrics.jsonl, whatever else fails
trained     a trained model is found by one word; nothing in its files opens a connection
"""
