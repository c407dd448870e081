"""Soft Memory Box: named memory segments that outlive the processes that share them."""
