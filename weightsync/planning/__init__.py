"""The parts of :mod:`weightsync.plan`: columns of integers, and what is decided on them.

``transfers.py`` the columns of a plan; ``columns.py`` of a layout; ``cover.py`` which boxes meet;
``topology.py`` and ``balance.py`` who of several holders gives; ``contract.py`` stream or direct;
``check.py`` what an engine trusts; ``share.py`` what one rank needs of a plan.
"""
