"""The chapters of the memory probes, one to a file; `memory_probes.py` lists them."""
