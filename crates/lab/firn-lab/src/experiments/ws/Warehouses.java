import java.net.DatagramPacket;
import java.net.DatagramSocket;
import java.net.InetAddress;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;

/**
 * A wholesaler's order processing, all in memory: one thread per warehouse, in the manner of SPECjbb.
 *
 * <pre>java Warehouses COUNT HOST PORT</pre>
 *
 * Prints "ready" when all warehouses are filled; then tells HOST:PORT once a second, by UDP, how many transactions were
 * done in that second. Ends with exit code 1 if an order is not what it was when it was taken.
 */
public final class Warehouses {
    static final int DISTRICTS = 10;
    static final int CUSTOMERS = 3000;
    static final int ITEMS = 20_000;
    static final int ORDERS_KEPT = 3000;

    static final class Customer {
        final byte[] data = new byte[400];
        final ArrayDeque<String> history = new ArrayDeque<>();
        long balance;
    }

    static final class Line {
        final int item;
        final int quantity;
        final String info;

        Line(int item, int quantity, String info) {
            this.item = item;
            this.quantity = quantity;
            this.info = info;
        }
    }

    static final class Order {
        final int customer;
        final List<Line> lines = new ArrayList<>();
        long sum;
        boolean delivered;

        Order(int customer) {
            this.customer = customer;
        }

        void add(Line line) {
            lines.add(line);
            sum += check(line);
        }

        void mustBeRight() {
            long found = 0;
            for (Line line : lines) {
                found += check(line);
            }
            if (found != sum) {
                System.out.println("wrong: an order of customer " + customer);
                System.exit(1);
            }
        }

        static long check(Line line) {
            return line.item * 31L + line.quantity * 7L + line.info.hashCode();
        }
    }

    static final class District {
        final Customer[] customers = new Customer[CUSTOMERS];
        final ArrayDeque<Order> orders = new ArrayDeque<>();
        final ArrayDeque<Order> open = new ArrayDeque<>();
        long paid;
    }

    static final class Warehouse implements Runnable {
        final District[] districts = new District[DISTRICTS];
        final int[] stock = new int[ITEMS];
        final String[] names = new String[ITEMS];
        final Random random;
        volatile long transactions;

        Warehouse(int number) {
            random = new Random(number);
            for (int item = 0; item < ITEMS; item++) {
                stock[item] = 100;
                names[item] = "item " + item + " of warehouse " + number;
            }
            for (int i = 0; i < DISTRICTS; i++) {
                District district = districts[i] = new District();
                for (int customer = 0; customer < CUSTOMERS; customer++) {
                    district.customers[customer] = new Customer();
                    random.nextBytes(district.customers[customer].data);
                }
                for (int order = 0; order < ORDERS_KEPT; order++) {
                    newOrder(district);
                }
            }
        }

        void newOrder(District district) {
            Order order = new Order(random.nextInt(CUSTOMERS));
            for (int line = 5 + random.nextInt(11); line > 0; line--) {
                int item = random.nextInt(ITEMS);
                int quantity = 1 + random.nextInt(10);
                stock[item] = stock[item] > quantity + 10 ? stock[item] - quantity : stock[item] + 91 - quantity;
                order.add(new Line(item, quantity, names[item] + " x " + quantity));
            }
            district.orders.addLast(order);
            district.open.addLast(order);
            while (district.orders.size() > ORDERS_KEPT) {
                district.orders.removeFirst().mustBeRight();
            }
            while (district.open.size() > ORDERS_KEPT) {
                district.open.removeFirst();
            }
        }

        void payment(District district) {
            Customer customer = district.customers[random.nextInt(CUSTOMERS)];
            int amount = random.nextInt(5000);
            customer.balance -= amount;
            district.paid += amount;
            customer.history.addLast("paid " + amount + ", balance " + customer.balance);
            if (customer.history.size() > 5) {
                customer.history.removeFirst();
            }
        }

        void status(District district) {
            int customer = random.nextInt(CUSTOMERS);
            for (Order order : district.orders) {
                if (order.customer == customer) {
                    order.mustBeRight();
                    return;
                }
            }
        }

        void delivery() {
            for (District district : districts) {
                Order order = district.open.pollFirst();
                if (order != null) {
                    order.mustBeRight();
                    order.delivered = true;
                    district.customers[order.customer].balance += order.sum % 10_000;
                }
            }
        }

        int stockLevel(District district) {
            int low = 0;
            int orders = 0;
            for (Order order : district.orders) {
                for (Line line : order.lines) {
                    low += stock[line.item] < 15 ? 1 : 0;
                }
                if (++orders == 20) {
                    break;
                }
            }
            return low;
        }

        /** Ten new orders and ten payments for each of the other three. */
        @Override
        public void run() {
            while (true) {
                District district = districts[random.nextInt(DISTRICTS)];
                int kind = random.nextInt(23);
                if (kind < 10) {
                    newOrder(district);
                } else if (kind < 20) {
                    payment(district);
                } else if (kind == 20) {
                    status(district);
                } else if (kind == 21) {
                    delivery();
                } else {
                    stockLevel(district);
                }
                transactions++;
            }
        }
    }

    public static void main(String[] args) throws Exception {
        Warehouse[] warehouses = new Warehouse[Integer.parseInt(args[0])];
        for (int number = 0; number < warehouses.length; number++) {
            warehouses[number] = new Warehouse(number);
        }
        for (Warehouse warehouse : warehouses) {
            Thread thread = new Thread(warehouse);
            thread.setDaemon(true);
            thread.start();
        }
        System.out.println("ready");
        DatagramSocket socket = new DatagramSocket();
        InetAddress host = InetAddress.getByName(args[1]);
        int port = Integer.parseInt(args[2]);
        long before = 0;
        while (true) {
            Thread.sleep(1000);
            long now = 0;
            for (Warehouse warehouse : warehouses) {
                now += warehouse.transactions;
            }
            byte[] text = Long.toString(now - before).getBytes();
            before = now;
            socket.send(new DatagramPacket(text, text.length, host, port));
        }
    }
}
