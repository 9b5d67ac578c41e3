"""``spark.read.format("delay")`` and ``df.write.format("delay")``: messages and the journal as DataFrames."""
