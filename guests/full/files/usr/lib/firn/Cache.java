import java.util.HashMap;
import java.util.Map;

/**
 * A server's cache in a JVM: fills a map, then replaces and looks up entries at random and checks each it finds.
 *
 * <pre>java -cp /usr/lib/firn/java Cache MIB SECONDS    (SECONDS 0 goes on for ever)</pre>
 *
 * One line per second with the operations so far; exit code 1 if an entry was wrong.
 */
public final class Cache {
    private static final int ENTRY_BYTES = 4096;

    private final Map<Integer, byte[]> entries = new HashMap<>();
    private final int count;
    private long state = 42;
    private long wrong;

    private Cache(int mib) {
        count = mib * (1 << 20) / ENTRY_BYTES;
        for (int key = 0; key < count; key++) {
            entries.put(key, entry(key, 0));
        }
    }

    private static byte[] entry(int key, int generation) {
        byte[] entry = new byte[ENTRY_BYTES];
        int value = key * 31 + generation;
        for (int at = 0; at < ENTRY_BYTES; at++) {
            entry[at] = (byte) (value + at * 7);
        }
        entry[0] = (byte) generation;
        return entry;
    }

    private static boolean right(int key, byte[] entry) {
        int value = key * 31 + (entry[0] & 0xff);
        for (int at = 1; at < ENTRY_BYTES; at += 61) {
            if (entry[at] != (byte) (value + at * 7)) {
                return false;
            }
        }
        return true;
    }

    private int random(int below) {
        state = state * 6364136223846793005L + 1442695040888963407L;
        return (int) ((state >>> 33) % below);
    }

    private void step() {
        int key = random(count);
        if (!right(key, entries.get(key))) {
            wrong++;
        }
        if (random(8) == 0) {
            entries.put(key, entry(key, random(256)));
        }
    }

    public static void main(String[] args) {
        Cache cache = new Cache(Integer.parseInt(args[0]));
        long seconds = Long.parseLong(args[1]);
        System.out.println("ready " + cache.count);
        long start = System.nanoTime();
        long reported = 0;
        for (long steps = 1;; steps++) {
            cache.step();
            if (steps % 256 != 0) {
                continue;
            }
            long elapsed = (System.nanoTime() - start) / 1_000_000_000L;
            if (elapsed > reported) {
                reported = elapsed;
                System.out.println("operations " + steps + " wrong " + cache.wrong);
            }
            if (seconds > 0 && elapsed >= seconds) {
                System.exit(cache.wrong == 0 ? 0 : 1);
            }
        }
    }
}
