"""How all exhibits stand, for the tests of what shows it: worked out when a test first asks."""

import functools

from dpcompanion.reproduction import scoreboard


@functools.cache
def everything():
    """The status of all exhibits, in order."""
    return scoreboard.exhibit_statuses()


@functools.cache
def by_name():
    """{the name of an exhibit: its status}."""
    return {one.exhibit.name: one for one in everything()}
