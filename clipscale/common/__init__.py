"""Parts that several folders use, a file for each subject. None of them imports another folder."""
