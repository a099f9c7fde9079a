"""What makes a run robust and repeatable. You need not read it to understand training.

errors      every exit code, in one table
needs       a Python without the packages is told where they are
cli         a command line becomes a preset; a mistake becomes one sentence
output      what is printed is printable; what is recorded has no secret of a URL
disk        a file is complete or absent; no name or link leads out of its folder
formats     what a JSON file holds, and the one check of what is read
shards      rows on disk: each is checked against its checksum whenever it is read
ranks       device and dtype are chosen; ranks connect, and answer each other, in bounded time
plan        every decision that the program takes is printed before the first step
folders     a run reads only the data it began with, and no other run writes into its folder
build       each weight is allocated once; a fallback after a failed trial step is printed
checkpoint  killed anywhere, a run resumes from the newest valid checkpoint to the same bits
log         what a run did is in metrics.jsonl, whatever else fails
screen      each number on the screen has its unit
trained     one word finds a trained model; nothing in its files opens a network connection
"""
