"""A loopback stand-in for the Hugging Face Hub's storage buckets, for tests and demonstrations.

It speaks the part of the Hub's HTTP API and of the Xet storage protocol that `huggingface_hub` uses for
buckets, so that the unmodified client runs against it without internet. Standard library only. Faults can
be switched on while it runs. It keeps everything in memory and checks no content hashes.

Must not import the library it helps to test, nor pytest.
"""
