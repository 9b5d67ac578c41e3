"""The dispatcher, the only service of this package: it delivers messages that are due. One loop per file."""
