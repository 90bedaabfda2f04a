"""Random faults: 100 of each kind in `make test`, 1,000 in `make torture`."""
