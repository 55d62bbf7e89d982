"""The chief: starts a job or brings it back from disk, saves it, and says when it is over.

checkpoint.py   a job's state on disk: save, find, load, verify, prune
folder.py       the names in a checkpoint folder
manifest.py     the text that describes a checkpoint and seals it
parts.py        the files that hold its arrays
files.py        what is done to the disk, and the lock on the folder
"""
