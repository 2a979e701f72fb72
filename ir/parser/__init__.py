"""The program that a text describes: the reverse of `accel.ir.text`."""
