"""What devices and networks can do: the profile forms, the shipped library, and how a cluster is spelled."""
