import sys
from tests.workers import WorkerPools
from tests.one_tmp import body

if __name__ == "__main__":
    with WorkerPools() as pools:
        try:
            print(*pools(int(sys.argv[1])).run(body, eval(sys.argv[2])), sep="\n")
        except Exception as e:
            print(str(e)[-3000:])
