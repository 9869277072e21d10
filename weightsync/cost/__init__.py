"""The cost model: how long a plan takes on a cluster, before there is one.

``constants.py`` rates with where each comes from; ``loads.py`` bytes of every link;
``estimates.py`` seconds and what bounds them. Pure: no device, no socket, no clock.
"""
