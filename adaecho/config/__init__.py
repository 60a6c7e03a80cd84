"""The typed schema that ``conf/`` fills, and the checks that a type can't say."""
