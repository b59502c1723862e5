"""Mutation tests of our own: small patches, each of which breaks one defence that a named test must notice.

A patch is a unified diff of one file in `patches/`, below a header of three lines:

    Breaks: what the patch breaks, in a few words
    Expected: killed (by its tests), survives (a harmless change), or equivalent (nothing can tell it apart; not run)
    Tests: node ids of pytest, separated by blanks

`python -m tools.mutants` (or `make mutants`) applies each to a copy of the tree and runs its tests there.
"""
