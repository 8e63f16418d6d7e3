"""The one pipe whose two ends are in two services: learner ranks send slices, the engines' workers get whole tensors.

Imports torch, so only those two ends import it, lazily. Knows torch and the manifest's messages, nothing else.
"""
