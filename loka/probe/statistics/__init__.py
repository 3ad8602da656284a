"""The statistics a Probe learns at every site, one file each: what a batch of rows says, and how two batches merge."""
