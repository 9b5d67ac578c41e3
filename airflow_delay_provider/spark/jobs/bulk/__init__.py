"""The parts of the bulk schedule job: arguments, input, columns, the write and its report."""
