from .cli import script

if __name__ == "__main__":  # processes of `perada compare` import this module under another name
    script()
