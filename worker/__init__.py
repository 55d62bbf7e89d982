"""The worker's side of training: what to learn (`models`), from what (`data`), and the loop.

`models` and `data` are plain NumPy: no gRPC, no threads, no clock.
"""
