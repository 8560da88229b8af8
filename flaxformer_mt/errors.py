"""The one exception that a user may see: his own mistake, named with both values and the remedy.

Owns nothing else. Every module may raise it; only the command line catches it.
"""


class UserError(Exception):
    """A mistake of the user's: the command line prints `error: <message>` and ends with status 2.

    The message names the thing, both values and the remedy in one line, or one line per problem.
    """
