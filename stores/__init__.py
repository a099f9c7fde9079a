"""Optional: what leaves the machine. Delete this folder, and training runs without --mirror.

store       objects under a URL; a download is checked against its sha256
mirror      a run outlives its machine; two machines do not write one run
stage       data is on a local disk, whole and verified, before the first step
"""
