"""The service room: customers bring tasks over HTTP, and one frozen backbone answers them all.

A supervisor starts web, engine and trainer processes; the database says what is to be done and who may ask. What the
web processes import has no torch.
"""
