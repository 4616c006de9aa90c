"""descant beside other libraries: the same rounds of FedAvg, each library in an environment of its own."""
