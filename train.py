"""Trains KLN: python train.py --config=configs/digits.py [--workdir=DIR]."""

from kln_jax.training.__main__ import main

if __name__ == "__main__":
    main()
