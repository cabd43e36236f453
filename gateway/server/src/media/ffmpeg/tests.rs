//! Every clip of the handed set gives what its expectation says.
