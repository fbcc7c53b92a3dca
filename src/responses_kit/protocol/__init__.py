"""The protocol without I/O: state machine, events, encoding, validation, encryption and ids."""
