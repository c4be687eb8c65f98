"""The native source of collectives: kernels at the dispatcher, in C++ (`probe.cpp`).

Ready-made (`ready.py`), else compiled at first use (`build.py`).
"""
