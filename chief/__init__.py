"""The chief: starts a job or brings it back from disk, saves it, and says when it is over.

supervisor.py   watches over a job from its beginning to its end
starter.py      how a job gets its state: initialised, restored or adopted
saver.py        when to save, where to restore from, how many checkpoints to keep
pace.py         how fast the job goes, and how soon to look again
assemble.py     shards <-> checkpoint
flags.py        a job's settings on the command line
checkpoint.py   a job's state on disk: save, find, load, verify, prune
folder.py       the names in a checkpoint folder
manifest.py     the text that describes a checkpoint and seals it
parts.py        the files that hold its arrays
files.py        what is done to the disk, and the lock on the folder
"""
