"""The main job of the product, shown with a real engine: `python demo/run.py`."""
