__version__="x"
