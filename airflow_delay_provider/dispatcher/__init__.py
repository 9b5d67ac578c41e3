"""The one service a deployment may run: it hands due messages of the ledger to their channels. One loop a file."""
