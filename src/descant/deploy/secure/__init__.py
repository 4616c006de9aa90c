"""Secure aggregation (Bonawitz et al., 2017): the server learns the sum of vectors, and none of them.

The protocol as two state machines that know nothing of transports, methods or files: `participant.py` for a
client, `summation.py` for the server. An attempt at a sum has five phases, each a request and a reply:

    advertise   a client makes two key pairs for this attempt and signs the public keys
    share       it deals shares of its secrets to the others, encrypted for each
    mask        it sends its vector, masked with a stream of its own and one for every other client
    confirm     it signs who is in the sum; it signs one such list in an attempt
    unmask      it reveals its shares: of the own streams of those who are in the sum, or of the keys of those
                who are not; never both of one client

The sum needs `needed` clients in every phase; whoever is missing after `share` does not spoil it. Keys and
shares are Flower's and `cryptography`'s. Flower's generator of masks is not used: its seed has 32 bits.
"""
