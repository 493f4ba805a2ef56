"""The network between the nodes of a cluster: protocol messages over plain sockets.

It promises little, because core/ expects little: any message may be lost, and those of different
streams overtake one another. What cannot be sent is dropped and counted, never waited for.
"""
