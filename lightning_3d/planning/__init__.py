"""Deciding what lies where: stages, loads, tensor parallel per block, in one frozen, printable plan."""
